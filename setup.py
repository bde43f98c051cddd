"Adds to pyproject.toml what settings.ini says: requirements, extras and how PyPI files the package"
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

ini = ConfigParser(delimiters=['='])
ini.read(Path(__file__).with_name('settings.ini'), encoding='utf-8')
cfg = ini['DEFAULT']
statuses = ['Planning', 'Pre-Alpha', 'Alpha', 'Beta', 'Production/Stable', 'Mature', 'Inactive']
extras = {k.removesuffix('_requirements'):v.split() for k,v in cfg.items() if k.endswith('_requirements')}
extras['all'] = [o for k in ('fast','export','hf','lightning','peft','trackers') for o in extras[k]]
extras['dev'] += [o for k in ('docs','fast','export','hf','lightning','peft') for o in extras[k]]
classifiers = [f"Development Status :: {cfg['status']} - {statuses[int(cfg['status'])-1]}", f"Intended Audience :: {cfg['audience']}",
    f"Natural Language :: {cfg['language']}", 'Programming Language :: Python :: 3 :: Only']

setup(install_requires=cfg['requirements'].split(), extras_require=extras, classifiers=classifiers)
