"""Tests that `make test` leaves to `make test-all`, so that it stays under ten minutes: each repeats at length what a
shorter test beside it already shows."""

from __future__ import annotations

SLOW = (
    "tests/cli/test_fit.py::TestProbesForReal::test_a_bug_at_a_later_shape_tells_what_was_found_before_it",
    "tests/cli/test_fit.py::TestProbesForReal::test_a_limit_of_the_shell_is_the_budget_of_the_probes_and_is_said",
    "tests/cli/test_fit.py::TestProbesForReal::test_json_is_all_of_stdout_and_a_job_runs_for_each_shape",
    "tests/cli/test_noise.py::test_ranks_of_torchrun_give_one_answer",
    "tests/device/test_byte_counter.py::test_counted_peak_equals_the_profilers[make_transformer-16]",
    "tests/device/test_host.py::TestVerdicts::test_the_limit_is_exact[make_transformer]",
    "tests/fitting/test_find_batch_size.py::test_a_real_model_accumulates_within_a_real_budget",
    "tests/fitting/test_fingerprint.py::test_the_same_in_another_process_with_another_hash_seed",
    "tests/fitting/test_fit.py::test_a_picklable_workload_can_be_isolated_and_another_says_why_not",
    "tests/fitting/test_fit.py::test_margin_keeps_headroom",
    "tests/integrations/test_audit_of_frameworks.py::test_a_trainer_with_a_causal_model_is_right",
    "tests/integrations/test_exact_loss.py::test_two_ranks_agree_with_the_big_batch",
    "tests/integrations/test_transformers.py::test_a_real_budget_is_kept",
    "tests/integrations/test_transformers.py::test_a_trainer_that_has_trained_goes_on_as_a_twin_does",
    "tests/memory/test_estimate.py::TestWhatIf::test_a_model_of_transformers_is_checkpointed_by_its_own_switch",
    "tests/memory/test_estimate.py::TestWhatIf::test_checkpointing_is_the_trace_of_a_model_checkpointed_by_hand",
    "tests/memory/test_estimate.py::test_no_change_of_a_transformer_at_a_large_batch_costs_more",
    "tests/memory/test_kernels.py::TestConvolutions::test_peak_is_the_real_one[grouped-20]",
    "tests/memory/test_kernels.py::TestRecurrentLayers::test_peak_is_the_real_one[GRU-both directions]",
    "tests/memory/test_kernels.py::TestRecurrentLayers::test_peak_is_the_real_one[GRU-time first]",
    "tests/memory/test_kernels.py::TestRecurrentLayers::test_peak_is_the_real_one[GRU-two layers]",
    "tests/memory/test_kernels.py::TestRecurrentLayers::test_peak_is_the_real_one[LSTM-time first]",
    "tests/memory/test_kernels.py::TestRecurrentLayers::test_peak_is_the_real_one[LSTM-two layers]",
    "tests/planning/test_dialects.py::test_the_pytorch_loop_under_torchrun_equals_one_big_step[2-nearest]",
    "tests/planning/test_dialects.py::test_the_pytorch_loop_under_torchrun_equals_one_big_step[4-exact]",
    "tests/sampler/test_frameworks.py::test_two_ranks_see_every_sample_once_per_epoch_in_as_many_steps",
    "tests/sampler/test_from_fit.py::test_a_real_fit_gives_a_sampler_whose_costliest_batch_ran",
    "tests/test_readme.py::test_block_runs_as_printed[estimate.md:127]",
    "tests/test_readme.py::test_block_runs_as_printed[estimate.md:173]",
    "tests/test_readme.py::test_block_runs_as_printed[fit.md:145]",
    "tests/test_readme.py::test_block_runs_as_printed[estimate.md:193]",
    "tests/test_readme.py::test_block_runs_as_printed[estimate.md:47]",
)
