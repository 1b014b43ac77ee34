"""What an environment and its machine offer: checked, prepared and reported."""
