//! Horizontal bars, in parts, with a standing line for the least that there can be.

use maud::{Markup, html};

use super::chart::{LETTER, WIDTH, label_at, stroke, tenth, titles};
use super::scale::Scale;

/// A chart of bars.
pub(crate) struct Bars {
    pub(crate) title: &'static str,
    pub(crate) subtitle: String,
    /// What the axis counts, and how much.
    pub(crate) x: (&'static str, Scale),
    /// The names of the parts of each bar, with their colours.
    pub(crate) parts: Vec<(&'static str, usize)>,
    /// What the standing lines are.
    pub(crate) limit: &'static str,
    pub(crate) bars: Vec<Bar>,
}

/// One of them.
pub(crate) struct Bar {
    pub(crate) name: String,
    /// As long as the parts' names.
    pub(crate) parts: Vec<f64>,
    /// What stands at its end.
    pub(crate) label: String,
    /// Where the standing line is, if that is known.
    pub(crate) limit: Option<f64>,
}

const TOP: f64 = 76.0;
const ROW: f64 = 30.0;
const THICK: f64 = 16.0;
/// On the right, for the number at the end of the longest bar.
const RIGHT: f64 = WIDTH - 76.0;

impl Bars {
    /// As SVG.
    pub(crate) fn draw(&self) -> Markup {
        let bottom = TOP + self.bars.len() as f64 * ROW;
        let view = format!("0 0 {WIDTH} {:.0}", bottom + 50.0);
        let left = self.left();
        html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox=(view) role="img"
                aria-label=(self.title) {
                (titles(self.title, &self.subtitle))
                (self.key())
                @for (value, label) in &self.x.1.ticks {
                    @let x = left + self.x.1.place(*value) * (RIGHT - left);
                    (stroke("grid", (x, TOP), (x, bottom)))
                    (label_at("tick", "middle", (x, bottom + 18.0), label))
                }
                @for (index, bar) in self.bars.iter().enumerate() {
                    (self.bar(bar, TOP + index as f64 * ROW))
                }
                (stroke("axis", (left, TOP), (left, bottom)))
                (label_at("unit", "middle", ((left + RIGHT) / 2.0, bottom + 38.0), self.x.0))
            }
        }
    }

    fn left(&self) -> f64 {
        let longest = self.bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0);
        (longest as f64 * LETTER + 24.0).min(WIDTH / 2.0)
    }

    /// What the colours and the line mean, in the line below the titles.
    fn key(&self) -> Markup {
        let mut x = 8.0;
        let parts = self.parts.iter().map(|(name, colour)| {
            let at = x;
            x += 40.0 + name.len() as f64 * LETTER;
            (name, colour, at)
        });
        let parts: Vec<_> = parts.collect();
        html! {
            @for (name, colour, x) in parts {
                rect class={ "bar c" (colour) } x=(tenth(x)) y="50" width="12" height="12" {}
                (label_at("tick", "start", (x + 17.0, 60.0), name))
            }
            (stroke("limit", (x + 4.0, 48.0), (x + 4.0, 64.0)))
            (label_at("tick", "start", (x + 12.0, 60.0), self.limit))
        }
    }

    fn bar(&self, bar: &Bar, top: f64) -> Markup {
        let (left, y) = (self.left(), top + (ROW - THICK) / 2.0);
        let at = |value: f64| left + self.x.1.place(value) * (RIGHT - left);
        let mut whole = 0.0;
        let parts = bar.parts.iter().zip(&self.parts).map(|(part, (_, colour))| {
            let from = at(whole);
            whole += part;
            (colour, from, at(whole))
        });
        let parts: Vec<_> = parts.collect();
        let limit = bar.limit.map(at);
        let end = at(whole).max(limit.unwrap_or(0.0)) + 8.0;
        html! {
            (label_at("tick", "end", (left - 8.0, y + 12.0), &bar.name))
            @for (colour, from, to) in parts {
                rect class={ "bar c" (colour) } x=(tenth(from)) y=(tenth(y))
                    width=(tenth(to - from)) height=(tenth(THICK)) {}
            }
            @if let Some(x) = limit { (stroke("limit", (x, y - 4.0), (x, y + THICK + 4.0))) }
            (label_at("name", "start", (end, y + 12.0), &bar.label))
        }
    }
}
