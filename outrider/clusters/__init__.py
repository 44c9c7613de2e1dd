"""Pools on clusters that another system manages: how many replicas a load needs, and Ray, which places them."""
