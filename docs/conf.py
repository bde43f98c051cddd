"Sphinx's settings for the pages that docs/build.py prepares"
import re
from nbdev.config import get_config
from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge

class Hanging(HtmlFormatter):
    "Each line of code is a block that knows its indent, so that what wraps hangs below it"
    def _lines(self, source):
        for is_code,line in source:
            plain = re.sub('<[^>]*>', '', line)
            n = len(plain)-len(plain.lstrip(' '))
            yield is_code,f'<span class="line" style="--indent:{n}">{line.rstrip(chr(10))}</span>\n'

    def wrap(self, source): return super().wrap(self._lines(source))

PygmentsBridge.html_formatter = Hanging

cfg = get_config()
project,author = cfg.title,cfg.author
version = release = cfg.version
copyright = author
extensions = ['myst_nb', 'sphinx.ext.mathjax', 'sphinx-mathjax-offline']
nb_execution_mode = 'off'  # nbdev-test runs the notebooks, and API entries are read off the package
nb_render_markdown_format = 'myst'
nb_ipywidgets_js = {}
myst_enable_extensions = ['dollarmath']
myst_dmath_double_inline = True
myst_heading_anchors = 4
suppress_warnings = ['myst.header']  # nbdev's API entries are H3 wherever they stand
html_theme = 'furo'
html_title = project
html_copy_source = html_use_index = False
pygments_style,pygments_dark_style = 'a11y-high-contrast-light','a11y-high-contrast-dark'
html_static_path,html_css_files,html_favicon = ['static'],['site.css'],'static/icon.svg'
