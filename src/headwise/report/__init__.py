"""What a scan says: findings in plain sentences, one self-contained page, a terminal summary.

``rules.toml`` holds every threshold; ``quantities`` the numbers that rules look at; ``findings``
the sentences; ``figures`` and ``embed`` the data of the page; ``page`` and ``terminal`` the forms.
"""
