//! The scale of an axis: the position of a number on it, and its marks.

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
