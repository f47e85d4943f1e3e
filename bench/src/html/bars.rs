//! Horizontal bars, in parts, with a standing line for the least that there can be.

use super::chart::{LETTER, WIDTH, label_at, stroke, tenth, titles};
use super::markup::Markup;
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
    /// Adds it to a page.
    pub(crate) fn draw(&self, out: &mut Markup) {
        let bottom = TOP + self.bars.len() as f64 * ROW;
        let view = format!("0 0 {WIDTH} {:.0}", bottom + 50.0);
        let attributes: [(&str, &dyn std::fmt::Display); 4] = [
            ("xmlns", &"http://www.w3.org/2000/svg"),
            ("viewBox", &view),
            ("role", &"img"),
            ("aria-label", &self.title),
        ];
        out.element("svg", &attributes, |out| {
            titles(out, self.title, &self.subtitle);
            self.draw_key(out);
            let left = self.left();
            for (value, label) in &self.x.1.ticks {
                let x = left + self.x.1.place(*value) * (RIGHT - left);
                stroke(out, "grid", (x, TOP), (x, bottom));
                label_at(out, "tick", "middle", (x, bottom + 18.0), label);
            }
            for (index, bar) in self.bars.iter().enumerate() {
                self.draw_bar(out, bar, TOP + index as f64 * ROW);
            }
            stroke(out, "axis", (left, TOP), (left, bottom));
            label_at(out, "unit", "middle", ((left + RIGHT) / 2.0, bottom + 38.0), self.x.0);
        });
    }

    fn left(&self) -> f64 {
        let longest = self.bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0);
        (longest as f64 * LETTER + 24.0).min(WIDTH / 2.0)
    }

    /// What the colours and the line mean, in the line below the titles.
    fn draw_key(&self, out: &mut Markup) {
        let mut x = 8.0;
        for (name, colour) in &self.parts {
            let (class, at) = (format!("bar c{colour}"), tenth(x));
            let attributes: [(&str, &dyn std::fmt::Display); 5] =
                [("class", &class), ("x", &at), ("y", &"50"), ("width", &"12"), ("height", &"12")];
            out.leaf("rect", &attributes, "");
            label_at(out, "tick", "start", (x + 17.0, 60.0), name);
            x += 40.0 + name.len() as f64 * LETTER;
        }
        stroke(out, "limit", (x + 4.0, 48.0), (x + 4.0, 64.0));
        label_at(out, "tick", "start", (x + 12.0, 60.0), self.limit);
    }

    fn draw_bar(&self, out: &mut Markup, bar: &Bar, top: f64) {
        let (left, y) = (self.left(), top + (ROW - THICK) / 2.0);
        let at = |value: f64| left + self.x.1.place(value) * (RIGHT - left);
        label_at(out, "tick", "end", (left - 8.0, y + 12.0), &bar.name);
        let mut start = 0.0;
        for (part, (_, colour)) in bar.parts.iter().zip(&self.parts) {
            let (from, to) = (at(start), at(start + part));
            let (class, y, height) = (format!("bar c{colour}"), tenth(y), tenth(THICK));
            let (x, width) = (tenth(from), tenth(to - from));
            let attributes: [(&str, &dyn std::fmt::Display); 5] =
                [("class", &class), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
            out.leaf("rect", &attributes, "");
            start += part;
        }
        let limit = bar.limit.map(at);
        if let Some(x) = limit {
            stroke(out, "limit", (x, y - 4.0), (x, y + THICK + 4.0));
        }
        let end = at(start).max(limit.unwrap_or(0.0)) + 8.0;
        label_at(out, "name", "start", (end, y + 12.0), &bar.label);
    }
}
