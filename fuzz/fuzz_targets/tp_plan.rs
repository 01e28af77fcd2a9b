//! See `weightd_checkpoint::fuzz::tp_plan` for what an input is and what is checked.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weightd_checkpoint::fuzz::tp_plan(input));
