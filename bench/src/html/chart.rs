//! Charts of lines over two axes, as SVG, and the scale of an axis: the position of a number on it,
//! and its marks. Colours are CSS classes, so that the style sheet can define a light and a dark
//! scheme.

use maud::{Markup, html};

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

/// How an axis spreads its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Linear,
    Log,
    /// Percentiles: as much room from 90 to 99 as from 99 to 99.9.
    Nines,
}

/// An axis, without its position in the chart.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    shape: Shape,
    min: f64,
    max: f64,
    /// The marks: number and label.
    pub(crate) ticks: Vec<(f64, String)>,
}

/// The highest percentile that is drawn. Above it there are too few operations.
pub(crate) const PERCENTILE_MAX: f64 = 99.999;
/// The approximate number of marks of a linear axis.
const TICKS: f64 = 5.0;

impl Scale {
    /// A linear axis from 0 to a round number at or above the largest value.
    pub(crate) fn linear(values: impl Iterator<Item = f64>, label: fn(f64) -> String) -> Self {
        let largest = values.fold(0.0, f64::max);
        let max = if largest > 0.0 { largest } else { 1.0 };
        let step = round_up(max / TICKS);
        let count = (max / step).ceil();
        let ticks = (0..=count as u32).map(|n| f64::from(n) * step);
        let ticks = ticks.map(|value| (value, label(value))).collect();
        Self { shape: Shape::Linear, min: 0.0, max: count * step, ticks }
    }

    /// A logarithmic axis over all values, with marks at 1, 2 and 5 times the powers of ten if
    /// there is room.
    pub(crate) fn log(values: impl Iterator<Item = f64> + Clone, label: fn(f64) -> String) -> Self {
        let max = values.clone().fold(1.0, f64::max);
        let min = values.filter(|value| *value > 0.0).fold(max, f64::min);
        let decades = (max / min).log10();
        let factors: &[f64] = match decades {
            ..1.5 => &[1.0, 2.0, 5.0],
            ..4.0 => &[1.0, 3.0],
            _ => &[1.0],
        };
        let powers = min.log10().floor() as i32..=max.log10().ceil() as i32;
        let all: Vec<f64> = powers
            .flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)))
            .collect();
        // From the mark below the smallest to the one above the largest.
        let below = all.iter().copied().filter(|tick| *tick <= min).fold(min, |_, tick| tick);
        let above = all.iter().copied().find(|tick| *tick >= max).unwrap_or(max);
        let above = if above > below { above } else { below * 10.0 };
        let ticks = all.into_iter().filter(|tick| (below..=above).contains(tick));
        let ticks = ticks.map(|value| (value, label(value))).collect();
        Self { shape: Shape::Log, min: below, max: above, ticks }
    }

    /// An axis of percentiles from 0 to [`PERCENTILE_MAX`].
    pub(crate) fn percentiles() -> Self {
        let ticks = [0.0, 50.0, 90.0, 99.0, 99.9, 99.99, PERCENTILE_MAX];
        let ticks = ticks.map(|value| (value, format!("{value} %"))).to_vec();
        Self { shape: Shape::Nines, min: 0.0, max: PERCENTILE_MAX, ticks }
    }

    /// The position of a number, from 0 at the start of the axis to 1 at its end.
    pub(crate) fn position(&self, value: f64) -> f64 {
        let bent = |value: f64| match self.shape {
            Shape::Linear => value,
            Shape::Log => value.max(f64::MIN_POSITIVE).ln(),
            Shape::Nines => -(1.0 - value / 100.0).max(1e-9).ln(),
        };
        let (value, min, max) = (bent(value), bent(self.min), bent(self.max));
        ((value - min) / (max - min)).clamp(0.0, 1.0)
    }
}

/// Rounds up to 1, 2, 2.5 or 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= value * 0.999);
    factor.unwrap_or(10.0) * power
}

/// Formats 1234567 as 1.23M: about three digits, without zeros at the end.
pub(crate) fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        ..1e3 => (value, ""),
        ..1e6 => (value / 1e3, "k"),
        ..1e9 => (value / 1e6, "M"),
        _ => (value / 1e9, "G"),
    };
    format!("{}{unit}", three_digits(scaled))
}

/// Formats nanoseconds in ns, us, ms or s, whichever fits.
pub(crate) fn duration(ns: f64) -> String {
    let (scaled, unit) = match ns {
        ..1e3 => (ns, "ns"),
        ..1e6 => (ns / 1e3, "\u{b5}s"),
        ..1e9 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(scaled))
}

fn three_digits(value: f64) -> String {
    let decimals = match value {
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    if decimals == 0 {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn marks_are_round_and_enclose_all_numbers() {
        let linear = Scale::linear([3.3e6, 1.2e6].into_iter(), short);
        assert_eq!(ticks(&linear), ["0", "1M", "2M", "3M", "4M"]);
        assert_eq!((linear.position(0.0), linear.position(4e6)), (0.0, 1.0));
        let log = Scale::log([250.0, 7000.0].into_iter(), duration);
        assert_eq!(
            ticks(&log),
            ["200 ns", "500 ns", "1 \u{b5}s", "2 \u{b5}s", "5 \u{b5}s", "10 \u{b5}s"]
        );
        assert!((log.position(2000f64.sqrt() * 1000f64.sqrt()) - 0.5).abs() < 0.01);
        let nines = Scale::percentiles();
        assert!((nines.position(90.0) * 5.0 - 1.0).abs() < 1e-9, "{}", nines.position(90.0));
    }

    #[test]
    fn one_number_or_none_has_an_axis_too() {
        for values in [vec![], vec![0.0], vec![1000.0], vec![5.0, 5.0]] {
            for scale in [
                Scale::linear(values.clone().into_iter(), short),
                Scale::log(values.clone().into_iter(), short),
            ] {
                for value in [0.0, 5.0, 1e12] {
                    assert!((0.0..=1.0).contains(&scale.position(value)), "{values:?} {scale:?}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_formatted_with_three_digits() {
        for (number, text) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (16.0, "16"),
            (999.0, "999"),
            (1e3, "1k"),
            (2.813e6, "2.81M"),
        ] {
            assert_eq!(short(number), text);
        }
        assert_eq!((duration(320.0), duration(3647.0)), ("320 ns".into(), "3.65 \u{b5}s".into()));
    }
}
