//! kv-resp: redis' own server answers the same requests with the same bytes, and clients of redis
//! work.

#[path = "resp/comparison.rs"]
mod comparison;
#[path = "resp/connections.rs"]
mod connections;
#[path = "resp/gateway.rs"]
mod gateway;
#[path = "resp/history.rs"]
mod history;
#[path = "resp/info.rs"]
mod info;
#[path = "resp/limits.rs"]
mod limits;
#[path = "resp/logins.rs"]
mod logins;
#[path = "resp/programs.rs"]
mod programs;
#[path = "resp/requests.rs"]
mod requests;
#[path = "resp/stores.rs"]
mod stores;
#[path = "resp/transactions.rs"]
mod transactions;
