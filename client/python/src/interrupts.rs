//! Calls without the GIL that end when a signal handler of Python raises, as that of Ctrl-C does,
//! or when the asyncio task that waits for them is cancelled.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farside::interruptible;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::fork;

thread_local! {
    /// What a signal handler has raised during the thread's present call.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
    /// Whether the task that waits for the thread's calls is cancelled, if they run for one.
    static CANCELLED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
    /// Whether this is the main thread of the process, as of so many forks.
    static IS_MAIN: Cell<Option<(u32, bool)>> = const { Cell::new(None) };
}

fn is_main_thread() -> bool {
    let forks = fork::count();
    if let Some((known_at, is_main)) = IS_MAIN.get()
        && known_at == forks
    {
        return is_main;
    }
    let is_main = rustix::thread::gettid() == rustix::process::getpid();
    IS_MAIN.set(Some((forks, is_main)));
    is_main
}

/// Whether Python runs signal handlers in this thread. It does in the main thread of the main
/// interpreter only; to attach to a subinterpreter without the GIL would block for ever.
fn handles_signals(py: Python<'_>) -> bool {
    is_main_thread() && fork::is_main_interpreter(py)
}

fn handler_raises() -> bool {
    let checked = Python::attach(|py| py.check_signals());
    let raised = checked.err();
    let has_raised = raised.is_some();
    RAISED.set(raised);
    has_raised
}

fn task_is_cancelled() -> bool {
    CANCELLED.with_borrow(|flag| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)))
}

/// Runs a call of the library without the GIL. Returns what a signal handler raised meanwhile, too.
fn run<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> (T, Option<PyErr>) {
    if handles_signals(py) {
        let result = py.detach(|| interruptible(handler_raises, call));
        return (result, RAISED.take());
    }
    let is_of_task = CANCELLED.with_borrow(Option::is_some);
    let result = py.detach(|| match is_of_task {
        true => interruptible(task_is_cancelled, call),
        false => call(),
    });
    (result, None)
}

/// Runs a call of the library without the GIL, and converts its error. If a signal handler raises,
/// the call ends, and the cause of the handler's exception is the call's error.
#[inline]
pub(crate) fn detach<T: Send, E: Send>(
    py: Python<'_>,
    convert: impl FnOnce(Python<'_>, &E) -> PyErr,
    call: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    let (result, raised) = run(py, call);
    let result = result.map_err(|error| convert(py, &error));
    match raised {
        None => result,
        Some(raised) => Err(after_handler(py, raised, result.err())),
    }
}

/// The exception of a signal handler, for a call that had this error or was complete.
#[cold]
fn after_handler(py: Python<'_>, raised: PyErr, error: Option<PyErr>) -> PyErr {
    if error.is_some() {
        raised.set_cause(py, error);
        return raised;
    }
    let note = "the call of farside was complete: what it changes is changed";
    match raised.value(py).call_method1("add_note", (note,)) {
        Ok(_) => raised,
        Err(failed) => failed,
    }
}

/// As [`detach`], for an operation.
#[inline]
pub(crate) fn operate<T: Send>(
    py: Python<'_>,
    operation: impl FnOnce() -> farside::Result<T> + Send,
) -> PyResult<T> {
    detach(py, errors::of_operation, operation)
}

/// Calls a function in a thread, for an asyncio task that may be cancelled meanwhile.
#[pyclass(frozen, module = "farside._farside")]
#[derive(Default)]
pub(crate) struct Cancellable(Arc<AtomicBool>);

/// Ends the thread's calls for a task.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        CANCELLED.set(None);
    }
}

#[pymethods]
impl Cancellable {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Calls the function. Calls of clients in it end early if the task is cancelled.
    #[pyo3(signature = (function, *arguments))]
    fn call<'py>(
        &self,
        function: &Bound<'py, PyAny>,
        arguments: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        CANCELLED.set(Some(self.0.clone()));
        let _end = End;
        function.call1(arguments)
    }

    /// The task was cancelled.
    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
