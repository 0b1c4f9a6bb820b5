import sys

from ork.cli.main import main

sys.exit(main())
