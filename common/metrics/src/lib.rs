//! Metrics as texts for Prometheus, for kv-server, kv-resp and the client library.
//!
//! Each of them has a collector, which writes its [`Families`]. [`render`] makes a text of it. With
//! the feature `http` a `MetricsListener` serves such texts.
#![deny(unsafe_code)]

mod exposition;
#[cfg(feature = "http")]
mod listener;

pub use exposition::{Families, MetricsFormat, encode_count, render};
#[cfg(feature = "http")]
pub use listener::{MetricsListener, MetricsServer, why_not_bound};

/// What a collector needs of the library that writes the texts.
pub use prometheus_client::{
    collector::Collector, encoding::DescriptorEncoder, encoding::NoLabelSet, metrics::MetricType,
    registry::Unit,
};
