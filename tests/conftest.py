"""Hypothesis draws the same cases in every run, so that a change is what breaks a test; `FASTSPARSE_EXPLORE=1` draws new ones. Kernels check what they write.
In a run on many workers, a line tells of each file once its last test is done."""
import gc,guards,os,pytest
from collections import Counter
from hypothesis import settings

guards.watch()
settings.register_profile('steady', derandomize=True, deadline=None)
settings.register_profile('explore', deadline=None)
settings.load_profile('explore' if os.environ.get('FASTSPARSE_EXPLORE') else 'steady')

class Files:
    "Of each file: tests to come, and the seconds of those that were run"
    def __init__(self, terminal): self.terminal,self.left,self.seconds,self.failed = terminal,{},Counter(),Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids): self.left = self.left or Counter(i.partition('::')[0] for i in ids)

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition('::')[0]
        self.seconds[file] += report.duration
        self.failed[file] += report.failed
        if report.when!='teardown' or file not in self.left: return
        self.left[file] -= 1
        if self.left[file]: return
        self.terminal.write_line(f"\n{file}: {self.seconds[file]:.0f} s{f', {self.failed[file]} failed' if self.failed[file] else ''}")

    def pytest_sessionfinish(self, session):
        "Keep the seconds of each file for `make quick`"
        cache = getattr(session.config, 'cache', None)
        if cache is not None: cache.set('fastsparse/seconds', cache.get('fastsparse/seconds', {}) | {k:round(v, 1) for k,v in self.seconds.items()})

@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    "What imports have made stays: each collection of garbage would walk through millions of its objects, for a second"
    gc.collect()
    gc.freeze()

def pytest_sessionstart(session):
    terminal = session.config.pluginmanager.get_plugin('terminalreporter')
    if terminal is not None and not hasattr(session.config, 'workerinput'): session.config.pluginmanager.register(Files(terminal))
