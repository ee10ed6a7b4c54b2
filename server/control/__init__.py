"""The control plane: decides who gets which granules of which device, and what every device side is to do. Has no device."""
