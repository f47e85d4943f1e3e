//! Proves that a benchmark of verbs keeps the blocks that it took, as any client does, and that the
//! server does not take it for one that is lost.

use std::time::Duration;

use farside_bench::raw_connection::RawConnection;
use farside_config::ClientConfig;
use farside_control::HELD_PER_MESSAGE_MAX;
use farside_layout::SizeClass;
use farside_tests::{ServerProcess, blocks_with_clients, wait_for_all_blocks};

use crate::workloads::bench;

#[on(each, rdma_in_soak)]
fn a_collection_takes_no_block_from_a_benchmark_of_verbs() {
    let server = ServerProcess::start("--memory 64MiB --grace-ms 5");
    let observer = server.client();
    let config = ClientConfig { server: Some(server.address()), ..ClientConfig::default() };
    let mut connection = RawConnection::connect(&config).unwrap();
    // More blocks than fit into a message.
    const BLOCKS: usize = HELD_PER_MESSAGE_MAX + 1;
    connection.take_blocks(SizeClass::for_bytes(64).unwrap(), BLOCKS).unwrap();
    let after = std::thread::scope(|scope| {
        let collecting = scope.spawn(|| observer.admin().collect().unwrap());
        while !collecting.is_finished() {
            connection.answer_all().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        collecting.join().unwrap()
    });
    assert_eq!((after.blocks_collected, after.clients_lost), (0, 0));
    assert_eq!(blocks_with_clients(&observer), BLOCKS as i64);
    connection.give_back().unwrap();
    wait_for_all_blocks(&observer);
}

/// Over RDMA the server fences a client whose process does not answer for 4 seconds.
#[on(each, rdma_in_soak)]
fn a_benchmark_of_verbs_answers_the_server_and_is_not_fenced() {
    let server = ServerProcess::start("--memory 64MiB");
    // Four verbs, and a warm-up: a little more than 6 seconds.
    bench(&["verbs", "--server", &server.address(), "--span", "1MiB", "--seconds", "1.5"])
        .succeeded();
    let observer = server.client();
    assert_eq!(observer.admin().statistics().unwrap().clients_lost, 0);
    wait_for_all_blocks(&observer);
}
