import sys
from pathlib import Path

# Tests are imported by path (importlib mode), so that helper modules beside them need this.
sys.path.insert(0, str(Path(__file__).parent))
