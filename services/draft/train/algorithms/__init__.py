"""What is trained: how a head is made, what it is fed with, and how it is published."""
