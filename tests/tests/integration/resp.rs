//! kv-resp: redis' own server answers the same requests with the same bytes, and clients of redis
//! work.

mod comparison;
mod connections;
mod gateway;
mod stores;
