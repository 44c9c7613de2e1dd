"""Overhead of the gateway per step: real services, gateway and streams, with simulated engines that only sleep."""
