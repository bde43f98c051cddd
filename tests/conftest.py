"Hypothesis draws the same cases in every run, so that a change is what breaks a test; `FASTSPARSE_EXPLORE=1` draws new ones"
import os
from hypothesis import settings

settings.register_profile('steady', derandomize=True, deadline=None)
settings.register_profile('explore', deadline=None)
settings.load_profile('explore' if os.environ.get('FASTSPARSE_EXPLORE') else 'steady')
