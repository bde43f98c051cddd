"For tools that ask for this file: pyproject.toml says everything"
from setuptools import setup

setup()
