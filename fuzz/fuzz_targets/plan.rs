// SPDX-License-Identifier: Apache-2.0
//! Two engines and a request between them, made of bytes. With `SHOW` set, the case is printed in the form of
//! tests/attacks/corpus instead of run.
#![no_main]
use kvhma_fuzz::{case::Case, check};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|case: Case| {
    if std::env::var_os("SHOW").is_some() {
        println!("{}", case.to_json());
        return;
    }
    check::case(&case);
});
