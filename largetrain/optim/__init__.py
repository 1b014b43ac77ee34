"""What the optimizer is given: parameter groups, and the learning rate's course over the updates."""
