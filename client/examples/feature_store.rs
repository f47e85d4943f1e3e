//! A feature store: a model reads many features of many users at once. `get_many` sends their GETs
//! in a few doorbells, so it takes little longer than one GET.
//!
//! ```sh
//! cargo run -p farside --example feature_store shm:///run/farside/kv.sock
//! ```
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::time::Duration;

use farside::{Client, Session};

/// Each feature, and its value for a user without one.
const FEATURES: [(&str, f32); 3] = [("age_days", 0.0), ("orders", 0.0), ("rating", 2.5)];

fn key(user: u32, feature: &str) -> String {
    format!("feature:{user}:{feature}")
}

/// Reads the features of these users: one row for each user.
fn features(session: &mut Session, users: &[u32]) -> Result<Vec<[f32; 3]>, Box<dyn Error>> {
    let of_user = |user: &u32| FEATURES.map(|(feature, _)| key(*user, feature));
    let values = session.get_many(users.iter().flat_map(of_user))?;
    let mut rows = Vec::new();
    for user_values in values.chunks(FEATURES.len()) {
        let mut row = FEATURES.map(|(_, default)| default);
        for (feature, value) in row.iter_mut().zip(user_values) {
            if let Some(value) = value {
                *feature = f32::from_le_bytes(value[..].try_into()?);
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: feature_store ADDRESS")?;
    let client = Client::builder().server(&address).connect()?;
    let mut session = client.session()?;

    // A job stores what it has computed.
    let computed = [(1, "age_days", 400.0_f32), (1, "orders", 12.0), (2, "rating", 4.5)];
    session.put_many(computed.map(|(user, name, value)| (key(user, name), value.to_le_bytes())))?;
    // A feature that is only valid for a while gets a TTL.
    let hour = Duration::from_secs(3600);
    session.put_with_ttl(key(1, "rating"), 3.5_f32.to_le_bytes(), hour)?;

    let before = session.counters().doorbells;
    let users = [1, 2, 3];
    let rows = features(&mut session, &users)?;
    let doorbells = session.counters().doorbells - before;
    for (user, [age_days, orders, rating]) in users.iter().zip(rows) {
        println!("user {user}: age_days {age_days}, orders {orders}, rating {rating}");
    }
    println!("{} GETs in {doorbells} doorbells", FEATURES.len() * users.len());
    Ok(())
}
