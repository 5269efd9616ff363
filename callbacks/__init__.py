"""Keras callbacks that know of more than one rank."""
