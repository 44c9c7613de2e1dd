"""Speculation in plain NumPy, the reference of both services: noise, sampling, acceptance, trees and proposals."""
