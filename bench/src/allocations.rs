//! Counts what each thread allocates, so that "no allocation per operation" is measured.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // It has a constant initializer and no destructor, so that reading it allocates nothing.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which also counts. A program installs it with `#[global_allocator]`.
pub struct CountingAllocator;

/// Returns how often this thread allocated or reallocated so far; 0 if the program did not install
/// [`CountingAllocator`].
pub fn of_this_thread() -> u64 {
    COUNT.get()
}

fn count() {
    COUNT.set(COUNT.get() + 1);
}

// SAFETY: every call is passed to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(block, layout, new_bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}
