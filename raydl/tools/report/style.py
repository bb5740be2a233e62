"""The style sheet of the page: light and dark, for print, and for narrow screens."""

from raydl.metrics import STACK
from raydl.metrics.charts import PALETTE

_COLORS = (":root {", *(f"  --{n}: {color};" for n, color in (PALETTE | STACK).items()), "}")
"""The colors of the charts, as CSS variables; the dark style overrides some of them."""

_PAGE = """
:root {
  color-scheme: light dark;
  --panel: #f6f7f8;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --ink: #e6e9ec; --soft: #9aa5b0; --rule: #30363c; --panel: #1e2327;
    --c0: #56b4e9; --c1: #ff8f40; --c2: #2fc89b; --c3: #e58bc5; --c4: #e0c040; --c5: #8fd0f5;
    --c6: #b79cf0; --c7: #aab4be;
    --forward_backward: #4a90d9; --replica_update: #8cc4e6; --center_update: #c9e2f2;
    --initialization: #566069;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 20px 60px; max-width: 1120px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 28px 0 8px; }
section.run { border-top: 3px solid var(--rule); margin-top: 48px; }
p { margin: 6px 0; }
.sub, .note { color: var(--soft); }
.note { font-size: 13px; }
.sub { overflow-wrap: anywhere; }
.warn {
  margin-top: 20px; padding: 4px 12px; border-left: 4px solid var(--c1);
  background: var(--panel);
}
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
dl.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 10px;
  margin: 20px 0 0;
}
dl.tiles div { background: var(--panel); border-radius: 8px; padding: 10px 14px; }
dl.tiles dt { color: var(--soft); font-size: 13px; }
dl.tiles dd { margin: 0; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
dl.tiles dd.long { font-size: 15px; }
dl.tiles dd small { display: block; font-size: 13px; font-weight: 400; color: var(--soft); }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  gap: 20px 28px;
}
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; }
.dot circle { fill: currentColor; opacity: 0; }
.dot circle:hover, .dot.few circle { opacity: 1; }
.mark circle { fill: var(--paper); stroke: currentColor; stroke-width: 1.8; }
.mark circle:hover { fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 14px; font-size: 14px; }
.key { overflow-wrap: anywhere; }
.choice { margin-top: 20px; }
.choice label {
  display: inline-block; margin-right: 18px; white-space: nowrap; font-size: 14px; cursor: pointer;
}
.sample { width: 28px; height: 12px; vertical-align: -1px; }
.choice .charts { margin-top: 16px; }
.swatch { width: 12px; height: 14px; vertical-align: -2px; }
.swatch.dashed rect { opacity: .5; }
.bars svg { display: block; width: 100%; height: 26px; margin-bottom: 10px; border-radius: 4px; }
.over { font-size: 14px; margin: 0 0 2px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: break-word; }
td .key, td code { white-space: nowrap; }
.below { display: block; color: var(--soft); font-size: 13px; }
.facts td { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.last td:last-child { width: 60%; }
.facts td:first-child { color: var(--soft); width: 34%; }
details { margin: 12px 0; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
footer { margin-top: 48px; color: var(--soft); font-size: 13px; }
@media (max-width: 520px) {
  body { padding: 18px 14px 40px; }
  svg text { font-size: 15px; }
  h1 { font-size: 22px; }
  dl.tiles { grid-template-columns: 1fr 1fr; }
  th, td { padding-right: 10px; }
  .wide table.last { min-width: 560px; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  .bars svg, .swatch, dl.tiles div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .charts { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; }
  tr, dl.tiles div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""

CSS = "\n".join((*_COLORS, _PAGE))
"""The style sheet; it needs no file and no font from elsewhere."""
