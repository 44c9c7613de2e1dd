"""GGUF checkpoints: conversion into the published safetensors layout."""
