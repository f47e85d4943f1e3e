//! Families of metrics: all samples of one name.

use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Unit;

/// Writes families of metrics. A unit is appended to a family's name.
#[derive(Debug)]
pub struct Families<'a>(DescriptorEncoder<'a>);

/// Each method writes one family, and fails if the library refuses a number.
#[allow(clippy::missing_errors_doc, reason = "stated once, above")]
impl<'a> Families<'a> {
    /// Writes to this encoder.
    pub fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Begins a family, whose samples the caller writes.
    pub fn family<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        unit: Option<&'s Unit>,
        metric_type: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, help, unit, metric_type)
    }

    /// A constant label.
    pub fn info(&mut self, name: &str, help: &str, label: (&str, &str)) -> fmt::Result {
        self.family(name, help, None, MetricType::Info)?.encode_info(&[label])
    }

    /// A number that rises and falls.
    pub fn gauge(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.family(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// A number of bytes that rises and falls.
    pub fn bytes(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.family(name, help, Some(&Unit::Bytes), MetricType::Gauge)?.encode_gauge(&value)
    }

    /// A time, in seconds.
    pub fn seconds(&mut self, name: &str, help: &str, value: Duration) -> fmt::Result {
        self.real(name, help, &Unit::Seconds, value.as_secs_f64())
    }

    /// A number with a fraction, in this unit.
    pub fn real(&mut self, name: &str, help: &str, unit: &Unit, value: f64) -> fmt::Result {
        self.family(name, help, Some(unit), MetricType::Gauge)?.encode_gauge(&value)
    }

    /// Numbers that rise and fall, one for each value of a label.
    pub fn gauges<'l>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        samples: impl IntoIterator<Item = ([(&'l str, &'l str); 1], u64)>,
    ) -> fmt::Result {
        let mut metric = self.family(name, help, unit, MetricType::Gauge)?;
        for (labels, value) in samples {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// A count.
    pub fn counter(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        encode_count(&mut self.family(name, help, None, MetricType::Counter)?, count)
    }

    /// Counts, one for each value of a label.
    pub fn counts(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        counts: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> fmt::Result {
        let mut metric = self.family(name, help, None, MetricType::Counter)?;
        for (value, count) in counts {
            encode_count(&mut metric.encode_family(&[(label, value)])?, count)?;
        }
        Ok(())
    }

    /// Histograms of times, one for each value of a label. Each has the sum of its times, in
    /// seconds, and for each bucket the greatest time and the count of those that are in no bucket
    /// before it. The last bucket has no greatest time: infinity.
    pub fn histograms(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        histograms: impl IntoIterator<Item = (&'static str, f64, Vec<(f64, u64)>)>,
    ) -> fmt::Result {
        let mut metric = self.family(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
        for (value, sum, buckets) in histograms {
            let count = buckets.iter().map(|(_, count)| count).sum();
            metric
                .encode_family(&[(label, value)])?
                .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}

/// Writes one sample of a family of counts.
///
/// # Errors
/// If the library refuses the number.
pub fn encode_count(metric: &mut MetricEncoder<'_>, count: impl EncodeCounterValue) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, _, f64>(&count, None::<&Exemplar<NoLabelSet, f64>>)
}
