//! What runs of one chart have in common, and which line of it they are.

use std::fmt;

use crate::environment::Origin;
use crate::pattern::DistributionReport;
use crate::report::{YcsbReport, grouped};
use crate::workload::Workload;
use crate::zipfian::THETA;

/// What all runs of a chart have in common.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Setting {
    fabric: String,
    /// 0 where that is what differs.
    records: u64,
    value_size: u32,
    /// What is said of the values' length; nothing in older results.
    sizes: String,
    /// The operations, where no workload says them.
    mix: String,
    processes: u32,
    /// The machine and the commit; nothing in older results.
    origin: String,
}

impl Setting {
    pub(crate) fn of(run: &YcsbReport) -> Self {
        let YcsbReport { fabric, records, value_size, processes, origin, .. } = run;
        let is_custom = run.workload.parse::<Workload>().is_err();
        let mix = run.pattern.mix.iter().filter(|_| is_custom);
        let mix: Vec<String> =
            mix.map(|(kind, share)| format!("{} % {kind}", percent(*share))).collect();
        let commit = origin.commit.as_ref().map(|commit| format!("commit {commit}"));
        let origin: Vec<String> = machine(origin).into_iter().chain(commit).collect();
        Self {
            fabric: fabric.clone(),
            records: *records,
            value_size: *value_size,
            sizes: run.pattern.value_size.name.clone(),
            mix: mix.join(" "),
            processes: *processes,
            origin: origin.join(", "),
        }
    }

    pub(crate) fn of_any_records(self) -> Self {
        Self { records: 0, ..self }
    }

    /// The mean.
    pub(crate) fn value_size(&self) -> u32 {
        self.value_size
    }

    pub(crate) fn is_of_one_length(&self) -> bool {
        self.sizes.is_empty() || self.sizes == self.value_size.to_string()
    }

    /// This, the rest of what a chart's runs have in common, and in a line of its own where they
    /// come from.
    pub(crate) fn subtitle(&self, rest: &str) -> String {
        format!("{self}{rest}\n{}", self.origin)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fabric, records, value_size, sizes, mix, processes, origin: _ } = self;
        match records {
            0 => write!(f, "{fabric}, records of ")?,
            _ => write!(f, "{fabric}, {} records of ", grouped(*records))?,
        }
        if self.is_of_one_length() {
            write!(f, "{value_size} B")?
        } else {
            write!(f, "{sizes}")?
        }
        if !mix.is_empty() {
            write!(f, ", {mix}")?;
        }
        if *processes > 1 { write!(f, ", {processes} processes") } else { Ok(()) }
    }
}

/// To a hundredth of a percent.
fn percent(share: f64) -> f64 {
    (share * 1e4).round() / 1e2
}

/// The workload, and its distribution if that is not what YCSB gives it.
pub(crate) fn curve(run: &YcsbReport) -> String {
    let DistributionReport { name, theta, hot_set, hot_operations } = &run.pattern.distribution;
    let usual = run.workload.parse::<Workload>().map(|workload| workload.default_shape().name());
    let theta = theta.filter(|theta| *theta != THETA);
    let mut curve = run.workload.clone();
    if !name.is_empty() && (theta.is_some() || usual != Ok(name.as_str())) {
        curve = format!("{curve} {name}");
    }
    for number in [theta, *hot_set, *hot_operations].into_iter().flatten() {
        curve = format!("{curve} {number}");
    }
    curve
}

pub(crate) fn threads(count: u32) -> String {
    format!("{count} thread{}", if count == 1 { "" } else { "s" })
}

/// Where a run was, in a few words, if that is known.
pub(crate) fn machine(origin: &Origin) -> Option<String> {
    let machine = &origin.machine;
    (!machine.processor.is_empty())
        .then(|| format!("{}, {} cores", machine.processor, machine.cores))
}
