//! Servers of a cluster: they take, continue and give up shards as the records say, and tell their
//! clients so. The records are in a folder.

mod clients;
mod commands;
mod histories;
mod membership;
mod outages;
mod records;
mod reruns;
mod rolling_restart;
mod snapshots;
