"""Configuration: nested frozen dataclasses, composed by Hydra, built and checked with the user's own key names."""

from hybridrl.config.build import to_yaml
from hybridrl.config.compose import load
from hybridrl.config.launch import launch
from hybridrl.config.schema import Groups, count_keys

__all__ = ["Groups", "count_keys", "launch", "load", "to_yaml"]
