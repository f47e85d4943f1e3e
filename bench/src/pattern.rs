//! The pattern of a run's operations: their kinds, their records, the lengths of values. It serves
//! the generator and the reports.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::args::Ycsb;
use crate::distribution::{Distribution, Shape};
use crate::records::ValueSize;
use crate::workload::Mix;

/// The pattern of a run's operations.
#[derive(Clone)]
pub struct Pattern {
    /// The kinds of operations.
    pub mix: Mix,
    /// The popularity of their records.
    pub distribution: Arc<Distribution>,
    /// How long the records' values are.
    pub sizes: ValueSize,
}

impl Pattern {
    /// The pattern that the command line asks for.
    pub fn new(args: &Ycsb) -> Self {
        let distribution = Distribution::new(args.shape(), &args.skew(), args.records);
        Self { mix: args.mix, distribution: Arc::new(distribution), sizes: args.value_size }
    }
}

/// The pattern in a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct PatternReport {
    /// The share of each kind of operation.
    pub mix: BTreeMap<String, f64>,
    pub distribution: DistributionReport,
    pub value_size: ValueSizeReport,
}

/// The popularity of records.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct DistributionReport {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub theta: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_set: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_operations: Option<f64>,
}

/// How long values are, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct ValueSizeReport {
    pub name: String,
    pub min: u32,
    pub mean: f64,
    pub max: u32,
}

impl PatternReport {
    /// The pattern that the command line asks for.
    pub fn new(args: &Ycsb) -> Self {
        let (shape, size) = (args.shape(), args.value_size);
        let is_hotspot = shape == Shape::Hotspot;
        let distribution = DistributionReport {
            name: shape.name().to_owned(),
            theta: shape.is_zipfian().then_some(args.theta),
            hot_set: is_hotspot.then_some(args.hot_set),
            hot_operations: is_hotspot.then_some(args.hot_operations),
        };
        let value_size = ValueSizeReport {
            name: size.to_string(),
            min: size.min(),
            mean: size.mean(),
            max: size.max(),
        };
        let mix = args.mix.kinds().map(|(kind, share)| (kind.name().to_owned(), share)).collect();
        Self { mix, distribution, value_size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::ycsb;

    #[test]
    fn a_report_has_only_the_parameters_of_its_distribution() {
        let json = |line: &str| serde_json::to_value(PatternReport::new(&ycsb(line))).unwrap();
        let zipfian = json("ycsb --workload b --theta 0.5 --value-size 64");
        assert_eq!(
            zipfian,
            serde_json::json!({
                "mix": { "get": 0.95, "put": 0.05 },
                "distribution": { "name": "zipfian", "theta": 0.5 },
                "value_size": { "name": "64", "min": 64, "mean": 64.0, "max": 64 },
            })
        );
        let upstream = json("ycsb -p requestdistribution=zipfian");
        assert_eq!(
            upstream["distribution"],
            serde_json::json!({ "name": "scrambled-zipfian", "theta": 0.99 })
        );
        let hotspot = json("ycsb --workload c --distribution hotspot --value-size uniform:1-4");
        assert_eq!(
            hotspot["distribution"],
            serde_json::json!({ "name": "hotspot", "hot_set": 0.2, "hot_operations": 0.8 })
        );
        assert_eq!(
            (&hotspot["value_size"]["mean"], &hotspot["mix"]["get"]),
            (&2.5.into(), &1.0.into())
        );
    }
}
