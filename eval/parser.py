"""The argument parser of the commands that take options: its errors are one sentence."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Ends with exit code 2 and one sentence, as the stages do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; --help shows the options\n")
