//! Each test of this binary says on which fabrics it runs.

#[on(shm)]
fn each_test_says_on_which_fabrics_it_runs() {
    farside_tests::fabric::assert_each_test_says_where_it_runs(6);
}
