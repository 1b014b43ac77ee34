"""Which ranks work together: process groups, and batch normalisation over them."""
