"Hypothesis draws the same cases in every run, so that a change is what breaks a test; `FASTSPARSE_EXPLORE=1` draws new ones. Kernels check what they write"
import os
from hypothesis import settings

os.environ.setdefault('FASTSPARSE_CHECK', '1')
settings.register_profile('steady', derandomize=True, deadline=None)
settings.register_profile('explore', deadline=None)
settings.load_profile('explore' if os.environ.get('FASTSPARSE_EXPLORE') else 'steady')
