"""A step's batch: its tokens as flat arrays, their layout, and their transfer to and from the device."""
