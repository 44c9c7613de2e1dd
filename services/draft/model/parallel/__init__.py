"""Devices and meshes."""
