"""The seam's grid: request features, where answers are cut, what must be equal, and the table of results."""
