//! The two text formats of metrics, and which of them a client of HTTP wants.
//!
//! The library `prometheus-client` writes OpenMetrics. The older format of Prometheus differs only
//! in the lines about a family: they have the name that its samples have, there are fewer types, no
//! units and no end.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

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
