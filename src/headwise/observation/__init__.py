"""Measuring models: loading, observing, the main loop. Import from its modules.

    survey   what can be measured    routed (transformers' models)   own (Headwise's)
    Call     one attention call      interface                       own
    Driver   how documents are read  routed_driver                   own_driver

Everything else knows neither kind of model.
"""
