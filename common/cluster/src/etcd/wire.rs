//! The JSON of etcd's gateway: protocol buffers in their JSON form. Keys and values are in base64,
//! numbers of 64 bits are texts, and fields with their default value are left out.

use data_encoding::BASE64;
use serde::{Deserialize, Deserializer};

use crate::store::Revision;

/// Returns the base64 of a key or a value.
pub(super) fn base64(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes.as_ref())
}

/// Reads base64.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64.decode(text.as_bytes()).map_err(serde::de::Error::custom)
}

/// Reads a number of 64 bits.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Number(u64),
        Text(String),
    }
    match Form::deserialize(deserializer)? {
        Form::Number(number) => Ok(number),
        Form::Text(text) => text.parse().map_err(serde::de::Error::custom),
    }
}

/// What every answer begins with.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) revision: Revision,
    #[serde(deserialize_with = "number")]
    pub(super) member_id: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: Revision,
    #[serde(deserialize_with = "bytes")]
    pub(super) value: Vec<u8>,
}

/// An answer in which every field but the header is missing if it has its default value.
#[derive(Debug, Deserialize)]
pub(super) struct Range {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct Txn {
    /// Only required: its absence shows that this is no answer of etcd.
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct Put {
    #[serde(rename = "header")]
    _header: Header,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Lease {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: u64,
    /// In seconds; 0 if the lease is gone.
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watch {
    pub(super) created: bool,
    pub(super) canceled: bool,
    pub(super) cancel_reason: String,
    #[serde(deserialize_with = "number")]
    pub(super) compact_revision: Revision,
    pub(super) events: Vec<serde::de::IgnoredAny>,
}

/// A message of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Refusal>,
}

/// An error, as a whole answer or in a stream. Versions of the gateway name its fields differently.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    #[serde(alias = "grpc_code")]
    pub(super) code: i64,
    pub(super) message: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Token {
    pub(super) token: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Status {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) version: String,
    /// The leader's id; 0 if there is none.
    #[serde(default, deserialize_with = "number")]
    pub(super) leader: u64,
}

/// The only answer without a header.
#[derive(Debug, Deserialize)]
pub(super) struct Alarms {
    #[serde(default)]
    pub(super) alarms: Vec<Alarm>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Alarm {
    #[serde(rename = "memberID", deserialize_with = "number")]
    pub(super) member: u64,
    pub(super) alarm: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Members {
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    pub(super) members: Vec<Member>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Member {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: u64,
    pub(super) name: String,
}
