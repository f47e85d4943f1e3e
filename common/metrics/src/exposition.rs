//! Families of metrics, each with all samples of one name, their two text formats, and which of
//! these a client of HTTP wants.
//!
//! The library `prometheus-client` writes OpenMetrics. The older format of Prometheus differs only
//! in the lines about a family: they have the name that its samples have, there are fewer types, no
//! units and no end.

use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricsFormat {
    /// OpenMetrics 1.0, `application/openmetrics-text`.
    OpenMetrics,
    /// The older format of Prometheus, `text/plain; version=0.0.4`.
    Prometheus,
}

impl MetricsFormat {
    /// Returns the format that is preferred by the values of the headers `Accept`. Without any
    /// preference it is that of Prometheus, which people and all tools can read.
    #[cfg(any(test, feature = "http"))]
    pub(crate) fn preferred<'a>(accepted: impl Iterator<Item = &'a str>) -> Self {
        let (mut open_metrics, mut prometheus) = (0.0, 0.0);
        for range in accepted.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let media_type = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut is_known_version) = (1.0, true);
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                let value = value.trim().trim_matches('"');
                match name.trim().to_ascii_lowercase().as_str() {
                    // An unreadable quality counts as a refusal.
                    "q" => quality = value.parse().unwrap_or(0.0),
                    "version" => is_known_version = ["1.0.0", "0.0.1", "0.0.4"].contains(&value),
                    _ => {}
                }
            }
            let best = match media_type.as_str() {
                "application/openmetrics-text" => &mut open_metrics,
                "text/plain" => &mut prometheus,
                _ => continue,
            };
            if is_known_version && quality > *best {
                *best = quality;
            }
        }
        let is_open = open_metrics > 0.0 && open_metrics >= prometheus;
        if is_open { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// Returns the value of the header `Content-Type` of such a text.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Returns the text of the families that the collector writes. `None` for a number that the library
/// refuses, which is logged.
pub fn render(format: MetricsFormat, collector: impl Collector) -> Option<String> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collector));
    let mut open_metrics = String::new();
    if text::encode(&mut open_metrics, &registry).is_err() {
        tracing::error!("FS-010 the metrics cannot be written: this is a bug, please report it");
        return None;
    }
    Some(match format {
        MetricsFormat::OpenMetrics => open_metrics,
        MetricsFormat::Prometheus => prometheus_text(&open_metrics),
    })
}

/// Converts OpenMetrics, as the library writes it, to the text format of Prometheus.
fn prometheus_text(open_metrics: &str) -> String {
    let (mut text, mut help) = (String::with_capacity(open_metrics.len()), "");
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // Its name takes a suffix that depends on the type, which is on the next line.
            help = rest.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                _ => ("", kind),
            };
            text += &format!("# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n");
        } else if !line.starts_with('#') {
            text.extend([line, "\n"]);
        }
    }
    text
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_the_one_that_the_client_prefers() {
        let preferred = |accept: &[&str]| MetricsFormat::preferred(accept.iter().copied());
        // Prometheus 2.42 and 3.5, as they send it.
        let prometheus_2 = "application/openmetrics-text;version=1.0.0,\
            application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,\
            */*;q=0.1";
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,\
            text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,\
            */*;q=0.2";
        for accept in [
            &[prometheus_2][..],
            &[prometheus_3],
            &["Application/OpenMetrics-Text ; Version=\"1.0.0\""],
            &["text/html", "application/openmetrics-text"],
            &["text/plain, application/openmetrics-text"],
        ] {
            assert_eq!(preferred(accept), MetricsFormat::OpenMetrics, "{accept:?}");
        }
        for accept in [
            &[][..],
            &["*/*"],
            &[""],
            &[",;q=;,=,"],
            &["text/html,application/xhtml+xml,*/*;q=0.8"],
            &["text/plain;version=0.0.4"],
            &["text/plain, application/openmetrics-text;q=0.5"],
            &["application/openmetrics-text;q=0"],
            &["application/openmetrics-text;q=x"],
            &["application/openmetrics-text;version=2.0.0,text/plain;q=0.1"],
        ] {
            assert_eq!(preferred(accept), MetricsFormat::Prometheus, "{accept:?}");
        }
    }

    #[test]
    fn the_text_of_prometheus_has_the_names_of_samples_and_no_units() {
        let open_metrics = "# HELP a_seconds Text of a.\n# TYPE a_seconds counter\n\
            # UNIT a_seconds seconds\na_seconds_total 1.5\n# HELP b Text.\n# TYPE b info\n\
            b_info{version=\"1\"} 1\n# HELP c Text.\n# TYPE c gauge\nc{x=\"# HELP\"} 7\n# EOF\n";
        let expected = "# HELP a_seconds_total Text of a.\n# TYPE a_seconds_total counter\n\
            a_seconds_total 1.5\n# HELP b_info Text.\n# TYPE b_info gauge\n\
            b_info{version=\"1\"} 1\n# HELP c Text.\n# TYPE c gauge\nc{x=\"# HELP\"} 7\n";
        assert_eq!(prometheus_text(open_metrics), expected);
    }
}
