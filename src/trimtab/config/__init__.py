"""Ask: what the user wants, as typed settings. Never looks at the hardware."""

from trimtab.config.checks import config_warnings
from trimtab.config.dump import config_schema, dump_config
from trimtab.config.facts import keeps_best
from trimtab.config.load import Request, load_config, load_request
from trimtab.config.problems import ConfigError
from trimtab.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Request",
    "config_schema",
    "config_warnings",
    "dump_config",
    "keeps_best",
    "load_config",
    "load_request",
]
