//! What goes wrong on command.

use super::FakeHost;
use crate::engine::EngineError;

impl FakeHost {
    /// The next `count` boots and revives fail.
    pub fn fail_starts(&self, count: usize) {
        let fault = || EngineError::failed("start")("a fake fault");
        self.state.lock().start_failures = std::iter::repeat_with(fault).take(count).collect();
    }

    /// The next `count` boots and revives find no address.
    pub fn lack_addresses(&self, count: usize) {
        let lack = || EngineError::Capacity { what: "addresses", detail: "fake".to_owned() };
        self.state.lock().start_failures = std::iter::repeat_with(lack).take(count).collect();
    }

    /// The next `count` saves find the disk full.
    pub fn fail_saves(&self, count: usize) {
        self.state.lock().fail_saves = count;
    }

    /// The next `count` machines that should go on do not.
    pub fn fail_resumes(&self, count: usize) {
        self.state.lock().fail_resumes = count;
    }

    /// The next `count` changes of resources fail.
    pub fn fail_resizes(&self, count: usize) {
        self.state.lock().fail_resizes = count;
    }
}
