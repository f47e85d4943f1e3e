//! Charts as SVG: lines over two axes, and horizontal bars. Colours are CSS classes, so that the
//! style sheet can define a light and a dark scheme.

use maud::{Markup, html};

use super::scale::Scale;

/// How many colours the style sheet has.
pub(crate) const COLOURS: usize = 7;

/// A chart of lines over two axes.
pub(crate) struct Chart {
    pub(crate) title: String,
    /// What all lines have in common.
    pub(crate) subtitle: String,
    pub(crate) x: (&'static str, Scale),
    pub(crate) y: (&'static str, Scale),
    pub(crate) lines: Vec<Line>,
    /// Whether each point has a dot, and each line its name at its end. If not, the names are in
    /// the lower right corner, where no line of a distribution is.
    pub(crate) dots: bool,
}

/// One line, from left to right.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Below [`COLOURS`].
    pub(crate) colour: usize,
    pub(crate) dashed: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

pub(crate) const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 416.0;
const LEFT: f64 = 76.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = HEIGHT - 50.0;
/// The distance from one name to the next.
const NAME_HEIGHT: f64 = 16.0;
/// The approximate width of a letter of a name.
pub(crate) const LETTER: f64 = 7.0;

impl Chart {
    /// As SVG.
    pub(crate) fn draw(&self) -> Markup {
        let view = format!("0 0 {WIDTH} {HEIGHT}");
        html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox=(view) role="img"
                aria-label=(self.title) {
                (titles(&self.title, &self.subtitle))
                (self.axes())
                @for line in &self.lines { (self.line(line)) }
                @if self.dots { (self.names_at_ends()) } @else { (self.names_in_corner()) }
            }
        }
    }

    /// The right end of the lines. Names may need room to the right of it.
    fn right(&self) -> f64 {
        let longest = self.lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
        let names = if self.dots { longest as f64 * LETTER + 18.0 } else { 0.0 };
        WIDTH - 28.0 - names.min(200.0)
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (x, y) = (self.x.1.position(x), self.y.1.position(y));
        (LEFT + x * (self.right() - LEFT), BOTTOM - y * (BOTTOM - TOP))
    }

    fn axes(&self) -> Markup {
        let right = self.right();
        let y_at = |value: f64| BOTTOM - self.y.1.position(value) * (BOTTOM - TOP);
        let x_at = |value: f64| LEFT + self.x.1.position(value) * (right - LEFT);
        html! {
            @for (y, label) in self.y.1.ticks.iter().map(|(value, label)| (y_at(*value), label)) {
                (stroke("grid", (LEFT, y), (right, y)))
                (label_at("tick", "end", (LEFT - 8.0, y + 4.0), label))
            }
            @for (x, label) in self.x.1.ticks.iter().map(|(value, label)| (x_at(*value), label)) {
                (stroke("grid", (x, TOP), (x, BOTTOM)))
                (label_at("tick", "middle", (x, BOTTOM + 18.0), label))
            }
            (stroke("axis", (LEFT, BOTTOM), (right, BOTTOM)))
            (label_at("unit", "middle", ((LEFT + right) / 2.0, BOTTOM + 38.0), self.x.0))
            (label_at("unit", "start", (8.0, TOP - 15.0), self.y.0))
        }
    }

    fn line(&self, line: &Line) -> Markup {
        let points: Vec<(f64, f64)> = line.points.iter().map(|point| self.at(*point)).collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let class = format!("line c{}{}", line.colour, if line.dashed { " dashed" } else { "" });
        html! {
            polyline class=(class) points=(path.join(" ")) {}
            @if self.dots {
                @for (x, y) in points {
                    circle class={ "dot c" (line.colour) } cx=(tenth(x)) cy=(tenth(y)) r="4" {}
                }
            }
        }
    }

    /// The names beside the lines' ends, moved apart if they would overlap.
    fn names_at_ends(&self) -> Markup {
        let mut ends: Vec<(&Line, (f64, f64))> = self
            .lines
            .iter()
            .filter_map(|line| Some((line, self.at(*line.points.last()?))))
            .collect();
        ends.sort_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b));
        let wanted: Vec<f64> = ends.iter().map(|(_, (_, y))| *y).collect();
        let places = moved_apart(&wanted, TOP, BOTTOM);
        let right = self.right();
        html! {
            @for ((line, (x, y)), place) in ends.into_iter().zip(places) {
                @let [leader, name] = ["leader", "name"].map(|of| format!("{of} c{}", line.colour));
                (stroke(&leader, (x + 5.0, y), (right + 10.0, place)))
                (label_at(&name, "start", (right + 13.0, place + 4.0), &line.name))
            }
        }
    }

    fn names_in_corner(&self) -> Markup {
        let longest = self.lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
        let x = self.right() - 14.0 - longest as f64 * LETTER;
        let top = BOTTOM - 12.0 - self.lines.len() as f64 * NAME_HEIGHT;
        let left = x - 38.0;
        let width = tenth(self.right() - 6.0 - left);
        let height = tenth(self.lines.len() as f64 * NAME_HEIGHT + 4.0);
        html! {
            rect class="behind" x=(tenth(left)) y=(tenth(top)) width=(width) height=(height) {}
            @for (index, line) in self.lines.iter().enumerate() {
                @let y = top + 14.0 + index as f64 * NAME_HEIGHT;
                @let dashed = if line.dashed { " dashed" } else { "" };
                @let class = format!("line c{}{dashed}", line.colour);
                (stroke(&class, (x - 32.0, y - 4.0), (x - 6.0, y - 4.0)))
                (label_at(&format!("name c{}", line.colour), "start", (x, y), &line.name))
            }
        }
    }
}

/// The title above a chart, and up to two lines of its subtitle.
pub(crate) fn titles(title: &str, subtitle: &str) -> Markup {
    html! {
        (label_at("title", "start", (8.0, 16.0), title))
        @for (line, y) in subtitle.lines().zip([31.0, 45.0]) {
            (label_at("subtitle", "start", (8.0, y), line))
        }
    }
}

/// A text with its anchor at this position.
pub(crate) fn label_at(class: &str, anchor: &str, at: (f64, f64), text: &str) -> Markup {
    html! { text class=(class) text-anchor=(anchor) x=(tenth(at.0)) y=(tenth(at.1)) { (text) } }
}

/// A straight line.
pub(crate) fn stroke(class: &str, from: (f64, f64), to: (f64, f64)) -> Markup {
    let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(tenth);
    html! { line class=(class) x1=(x1) y1=(y1) x2=(x2) y2=(y2) {} }
}

pub(crate) fn tenth(value: f64) -> String {
    format!("{value:.1}")
}

/// Moves positions apart, so that they keep [`NAME_HEIGHT`] of distance and stay inside. `wanted`
/// is in ascending order.
fn moved_apart(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let mut positions = wanted.to_vec();
    let mut y_min = top;
    for y in &mut positions {
        *y = y.max(y_min);
        y_min = *y + NAME_HEIGHT;
    }
    let mut y_max = bottom;
    for y in positions.iter_mut().rev() {
        *y = y.min(y_max);
        y_max = *y - NAME_HEIGHT;
    }
    positions
}

/// A chart of bars.
pub(crate) struct Bars {
    pub(crate) title: &'static str,
    pub(crate) subtitle: String,
    /// The unit of the axis, and its scale.
    pub(crate) x: (&'static str, Scale),
    /// The names of the parts of each bar, with their colours.
    pub(crate) parts: Vec<(&'static str, usize)>,
    /// The meaning of the vertical line of each bar.
    pub(crate) limit: &'static str,
    pub(crate) bars: Vec<Bar>,
}

/// One bar.
pub(crate) struct Bar {
    pub(crate) name: String,
    /// The length of each part, in the order of [`Bars::parts`].
    pub(crate) parts: Vec<f64>,
    /// The text at its end.
    pub(crate) label: String,
    /// The value of its vertical line, if it is known.
    pub(crate) limit: Option<f64>,
}

const BARS_TOP: f64 = 76.0;
const ROW: f64 = 30.0;
const THICK: f64 = 16.0;
/// The right end of the longest bar; its number needs the room to the right.
const BARS_RIGHT: f64 = WIDTH - 76.0;

impl Bars {
    /// As SVG.
    pub(crate) fn draw(&self) -> Markup {
        let bottom = BARS_TOP + self.bars.len() as f64 * ROW;
        let view = format!("0 0 {WIDTH} {:.0}", bottom + 50.0);
        let left = self.left();
        html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox=(view) role="img"
                aria-label=(self.title) {
                (titles(self.title, &self.subtitle))
                (self.key())
                @for (value, label) in &self.x.1.ticks {
                    @let x = left + self.x.1.position(*value) * (BARS_RIGHT - left);
                    (stroke("grid", (x, BARS_TOP), (x, bottom)))
                    (label_at("tick", "middle", (x, bottom + 18.0), label))
                }
                @for (index, bar) in self.bars.iter().enumerate() {
                    (self.bar(bar, BARS_TOP + index as f64 * ROW))
                }
                (stroke("axis", (left, BARS_TOP), (left, bottom)))
                (label_at("unit", "middle", ((left + BARS_RIGHT) / 2.0, bottom + 38.0), self.x.0))
            }
        }
    }

    fn left(&self) -> f64 {
        let longest = self.bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0);
        (longest as f64 * LETTER + 24.0).min(WIDTH / 2.0)
    }

    /// The legend of the colours and of the vertical line, below the titles.
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
        let at = |value: f64| left + self.x.1.position(value) * (BARS_RIGHT - left);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_their_distance() {
        for wanted in [vec![], vec![70.0, 71.0, 72.0], vec![300.0, 349.0, 350.0], vec![62.0; 10]] {
            let places = moved_apart(&wanted, TOP, BOTTOM);
            assert_eq!(places.len(), wanted.len());
            assert!(places.windows(2).all(|two| two[1] - two[0] >= NAME_HEIGHT), "{places:?}");
            assert!(places.iter().all(|place| (TOP..=BOTTOM).contains(place)), "{places:?}");
        }
        assert_eq!(moved_apart(&[100.0, 200.0], TOP, BOTTOM), [100.0, 200.0]);
    }
}
