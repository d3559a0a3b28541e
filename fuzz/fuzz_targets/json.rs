// SPDX-License-Identifier: Apache-2.0
//! Any bytes as the JSON form: refused, or a geometry that pairs with itself.
#![no_main]
use std::sync::Arc;

use kvhma_core::{Geometry, Plan, PlanOptions, validate};
use kvhma_fuzz::check;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(geometry) = Geometry::from_json(data) else { return };
    check::addresses(&geometry);
    let geometry = Arc::new(geometry);
    let errors = validate(&geometry, &geometry).iter().filter(|found| found.code != "no-common-layer").count();
    assert_eq!(errors, 0, "a geometry does not pair with itself");
    if let Ok(plan) = Plan::new(geometry.clone(), vec![geometry], PlanOptions::EXACT) {
        check::views(&plan);
    }
});
