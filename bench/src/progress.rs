//! The line on stderr that shows how a run advances.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::publish::grouped;

/// A line on stderr that is drawn over and over; invisible if stderr is no terminal.
pub struct ProgressLine(ProgressBar);

impl Default for ProgressLine {
    fn default() -> Self {
        Self::new()
    }
}

impl ProgressLine {
    /// An empty line.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// Shows the rate of a phase, in operations a second, and how long the phase has taken.
    pub fn show(&self, phase: &str, rate: f64, elapsed: Duration) {
        let rate = grouped(rate as u64);
        self.0.set_message(format!("{phase:<8} {rate:>12} ops/s  {:.1} s", elapsed.as_secs_f64()));
        self.0.tick();
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
