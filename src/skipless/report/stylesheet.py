"""The page's only stylesheet: system fonts, light and dark, narrow and wide. Read by html."""

CSS = """
:root{color-scheme:light dark;--page:#fff;--card:#f7f8fa;--accent:#1f5fbf;LIGHT}
@media (prefers-color-scheme:dark){:root{--page:#14171c;--card:#1a1f26;--accent:#74a9ff;DARK}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
 font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:72rem;margin:0 auto;padding:2.5rem 1.25rem 5rem}
h1{font-size:clamp(1.6rem,4vw,2.3rem);line-height:1.2;margin:0 0 .4rem;letter-spacing:-.015em}
h2{font-size:1.3rem;margin:3.2rem 0 .8rem;padding-top:1.2rem;border-top:1px solid var(--grid)}
h3{font-size:1.05rem;margin:0 0 .2rem}
p{margin:.5rem 0;max-width:46rem}
.quiet,figcaption,.note{color:var(--quiet)}
.quiet,.note{font-size:.9rem}
.lede{font-size:1.12rem;line-height:1.5;max-width:none;margin:1rem 0 1.4rem;padding:1rem 1.25rem;
 background:var(--card);border-left:4px solid var(--accent);border-radius:0 8px 8px 0}
.findings{display:grid;grid-template-columns:minmax(9rem,12rem) 1fr;gap:.9rem 1.6rem;margin:0}
.findings dt{font-weight:600}
.findings dd{margin:0}
.findings .note{margin:0 0 .35rem}
.findings ul{margin:0;padding-left:1.1rem}
.findings li{margin:0 0 .35rem}
.findings li::marker{color:var(--quiet)}
.scroll{overflow-x:auto;margin:.8rem 0;border:1px solid var(--grid);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.5rem .7rem;text-align:right;white-space:nowrap;vertical-align:top}
thead th{font-weight:600;color:var(--quiet);vertical-align:bottom;
 border-bottom:1px solid var(--grid);white-space:normal;line-height:1.3}
tbody tr+tr>*{border-top:1px solid var(--grid)}
th:first-child{text-align:left;position:sticky;left:0;background:var(--page);font-weight:600;
 white-space:normal;min-width:13.5rem;max-width:18rem;overflow-wrap:anywhere}
th:first-child span{display:flex;align-items:baseline}
td.text,thead th.text{text-align:left;white-space:normal;min-width:6.5rem;overflow-wrap:anywhere}
td small,th small{display:block;color:var(--quiet);font-weight:400}
td.best{font-weight:700}
.worse{color:var(--quiet)}
.swatch{width:2.1rem;height:.6rem;margin-right:.5rem;flex:none}
figure{margin:2.2rem 0}
.plot{overflow-x:auto;margin-top:.6rem}
.plot svg{display:block;width:100%;min-width:42rem;height:auto}
figcaption{font-size:.92rem;max-width:50rem}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(20rem,100%),1fr));gap:1rem}
.sample{background:var(--card);border-radius:8px;padding:.9rem 1.1rem}
.sample h3{display:flex;align-items:center;overflow-wrap:anywhere}
.sample blockquote{margin:.5rem 0 0;overflow-wrap:anywhere;font-size:.92rem}
.sample i{color:var(--quiet);font-style:normal;opacity:.6}
.sample b{color:var(--quiet);font-weight:600}
.glossary{columns:2 22rem;column-gap:2.5rem;margin:0}
.glossary div{break-inside:avoid;margin-bottom:.7rem}
.glossary dt{font-weight:600}
.glossary dd{margin:0;font-size:.93rem}
.missing{margin-top:2rem;background:var(--card);border-radius:8px;padding:.8rem 1.2rem}
.missing ul{margin:.3rem 0;padding-left:1.1rem}
details{border:1px solid var(--grid);border-radius:8px;padding:.5rem .9rem;margin:.5rem 0}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}
pre{overflow-x:auto;background:var(--card);border-radius:8px;padding:.8rem 1rem;font-size:.82rem;
 line-height:1.5}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (max-width:44rem){.findings{grid-template-columns:1fr;gap:.2rem}
 .findings dd{margin-bottom:.9rem}
 th:first-child{min-width:8.5rem;max-width:9rem}
 th:first-child span{display:block}.swatch{display:block;margin-bottom:.2rem}
 th,td{padding:.45rem .5rem}}
@media print{main{max-width:none}details{break-inside:avoid}figure{break-inside:avoid}}
"""


def css(light: str, dark: str) -> str:
    """The stylesheet with the declarations of the rows' colours filled in."""
    return CSS.replace("LIGHT", light).replace("DARK", dark).strip()
