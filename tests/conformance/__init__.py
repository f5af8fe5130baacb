"""What every implementation of an interface promises, tried on each of them."""
