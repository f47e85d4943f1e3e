//! Charts of lines over two axes, as SVG. Colours are CSS classes, so that the style sheet can
//! define a light and a dark scheme.

use maud::{Markup, html};

use super::scale::Scale;

/// How many colours the style sheet has.
pub(crate) const COLOURS: usize = 7;

/// A chart of lines over two axes.
pub(crate) struct Chart {
    pub(crate) title: String,
    /// The settings that all lines have in common.
    pub(crate) subtitle: String,
    pub(crate) x: (&'static str, Scale),
    pub(crate) y: (&'static str, Scale),
    pub(crate) lines: Vec<Line>,
    /// Whether each point has a dot.
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

const WIDTH: f64 = 640.0;
const LEFT: f64 = 76.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 366.0;
/// The room below the horizontal axis for its marks and its unit.
const AXIS_HEIGHT: f64 = 50.0;
/// The distance from one name to the next.
const NAME_HEIGHT: f64 = 16.0;
/// The approximate width of a letter of a name.
const LETTER: f64 = 7.0;
/// Limit on the room for names.
const NAMES_WIDTH_MAX: f64 = 240.0;

impl Chart {
    /// The chart as SVG.
    pub(crate) fn draw(&self) -> Markup {
        let names_height = self.lines.len() as f64 * NAME_HEIGHT;
        let view = format!("0 0 {WIDTH} {}", (BOTTOM + AXIS_HEIGHT).max(TOP + names_height));
        html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox=(view) role="img"
                aria-label=(self.title) {
                (label_at("title", "start", (8.0, 16.0), &self.title))
                @for (line, y) in self.subtitle.lines().zip([31.0, 45.0]) {
                    (label_at("subtitle", "start", (8.0, y), line))
                }
                (self.axes())
                @for (index, line) in self.lines.iter().enumerate() {
                    (self.line(line, TOP + 10.0 + index as f64 * NAME_HEIGHT))
                }
            }
        }
    }

    /// The right end of the lines. The names need room to the right of it.
    fn right(&self) -> f64 {
        let longest = self.lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
        WIDTH - (longest as f64 * LETTER + 52.0).min(NAMES_WIDTH_MAX)
    }

    fn x_at(&self, value: f64) -> f64 {
        LEFT + self.x.1.position(value) * (self.right() - LEFT)
    }

    fn y_at(&self, value: f64) -> f64 {
        BOTTOM - self.y.1.position(value) * (BOTTOM - TOP)
    }

    fn axes(&self) -> Markup {
        let right = self.right();
        html! {
            @for (value, label) in &self.y.1.ticks {
                @let y = self.y_at(*value);
                (stroke("grid", (LEFT, y), (right, y)))
                (label_at("tick", "end", (LEFT - 8.0, y + 4.0), label))
            }
            @for (value, label) in &self.x.1.ticks {
                @let x = self.x_at(*value);
                (stroke("grid", (x, TOP), (x, BOTTOM)))
                (label_at("tick", "middle", (x, BOTTOM + 18.0), label))
            }
            (stroke("axis", (LEFT, BOTTOM), (right, BOTTOM)))
            (label_at("unit", "middle", ((LEFT + right) / 2.0, BOTTOM + 38.0), self.x.0))
            (label_at("unit", "start", (8.0, TOP - 15.0), self.y.0))
        }
    }

    /// The line, and its name at this height.
    fn line(&self, line: &Line, name_y: f64) -> Markup {
        let at = |(x, y): &(f64, f64)| (self.x_at(*x), self.y_at(*y));
        let points: Vec<(f64, f64)> = line.points.iter().map(at).collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let class = format!("line c{}{}", line.colour, if line.dashed { " dashed" } else { "" });
        let (name_x, name_class) = (self.right() + 14.0, format!("name c{}", line.colour));
        html! {
            polyline class=(class) points=(path.join(" ")) {}
            @if self.dots {
                @for (x, y) in points {
                    circle class={ "dot c" (line.colour) } cx=(tenth(x)) cy=(tenth(y)) r="4" {}
                }
            }
            (stroke(&class, (name_x, name_y - 4.0), (name_x + 26.0, name_y - 4.0)))
            (label_at(&name_class, "start", (name_x + 32.0, name_y), &line.name))
        }
    }
}

/// A text with its anchor at this position.
fn label_at(class: &str, anchor: &str, at: (f64, f64), text: &str) -> Markup {
    html! { text class=(class) text-anchor=(anchor) x=(tenth(at.0)) y=(tenth(at.1)) { (text) } }
}

/// A straight line.
fn stroke(class: &str, from: (f64, f64), to: (f64, f64)) -> Markup {
    let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(tenth);
    html! { line class=(class) x1=(x1) y1=(y1) x2=(x2) y2=(y2) {} }
}

fn tenth(value: f64) -> String {
    format!("{value:.1}")
}
